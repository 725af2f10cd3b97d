#!/usr/bin/env bash
# pyarrow 26.0.1: a dictionary of string views cannot be decoded.
#
# dictionary_decode() and take() of a DictionaryArray whose values are string_view raise ArrowNotImplementedError, and
# so does the cast to string, although string_view itself casts to string. Such a column is what polars writes for a Categorical
# or an Enum by default (write_ipc). What works: casting the dictionary's values first, and making the array again.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet pyarrow==26.0.1 polars==2.1.0
"$folder/env/bin/python" - "$folder/a.arrow" <<'PY'
import sys

import polars as pl
import pyarrow as pa

pl.DataFrame({"c": pl.Series(["a", "b", "a"], dtype=pl.Categorical)}).write_ipc(sys.argv[1])
with pa.ipc.open_file(sys.argv[1]) as reader:
    column = reader.get_batch(0).column("c")
print(f"pyarrow {pa.__version__}, polars {pl.__version__}: {column.type}")
failed = []
for name, call in {"dictionary_decode": column.dictionary_decode, "cast": lambda: column.cast(pa.string())}.items():
    try:
        print(name, call().to_pylist())
    except pa.ArrowNotImplementedError as error:
        failed.append(name)
        print(f"{name}: {error}")
values = column.dictionary.cast(pa.string())
print("values first:", pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode().to_pylist())
raise SystemExit("dictionary_decode" not in failed)
PY
