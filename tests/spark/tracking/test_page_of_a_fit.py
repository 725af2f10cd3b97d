"""The page of a real fit in a real browser, whose driver is killed; where there is a Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
FIT = """
import keras
import numpy as np
import sparkdl
from pyspark.sql import SparkSession

page = sparkdl.dashboard()
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rng = np.random.default_rng(0)
x = rng.normal(size=(4096, 64)).astype("float32")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, "softmax")])
model.compile("sgd", "sparse_categorical_crossentropy")
sparkdl.SparkModel(model, num_workers=2).fit((x, x[:, :10].argmax(1)), epochs=100_000, verbose=0)
"""


@pytest.mark.slow
def test_the_page_of_a_fit_stays_when_its_driver_is_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", FIT], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    said: list[str] = []
    try:
        assert driver.stdout is not None
        link = re.search(r"http://\S+", driver.stdout.readline())
        assert link is not None
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            tab: Any = browser.new_page()
            tab.set_default_timeout(300_000)
            tab.on("pageerror", lambda error: said.append(str(error)))
            tab.goto(link[0])
            tab.locator("#headline", has_text="Rows per second").first.wait_for()
            tab.locator("#workers", has_text="training").first.wait_for()
            before = tab.inner_text("#headline")
            tab.wait_for_function(
                "b => document.querySelector('#headline').innerText !== b", arg=before
            )
            driver.kill()
            driver.wait(60)
            tab.locator("#link", has_text="does not answer").first.wait_for()
            assert "of 100000" in tab.inner_text("#headline")  # what was drawn stays
            assert tab.locator("#curves canvas").count() == 1
            assert tab.locator("#workers tr").count() == 3
            assert said == []
            browser.close()
    finally:
        driver.kill()
        driver.wait(60)
