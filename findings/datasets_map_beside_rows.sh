#!/usr/bin/env bash
# datasets 5.2.0: map of a data set from load_from_disk writes its result into the folder of the rows that it reads.
#
# A folder of save_to_disk has data-00000-of-00001.arrow with 3 rows. load_from_disk(folder).map(...) is said to give a new data
# set and to leave the old one as it is. It does, to load_from_disk; but the result lies in the same folder as cache-<hash>.arrow, so
# whoever reads the folder's Arrow files, as with any other folder of rows, gets 6 rows: the old ones and the mapped ones.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
HF_HOME="$folder/home" "$folder/env/bin/python" - "$folder/rows" <<'PY' 2>/dev/null
import glob
import os
import sys

import datasets
import pyarrow as pa

rows = sys.argv[1]
datasets.Dataset.from_dict({"id": [0, 1, 2]}).save_to_disk(rows)
mapped = datasets.load_from_disk(rows).map(lambda row: {"id": row["id"] + 100})
again = datasets.load_from_disk(rows)
found = {}
for path in sorted(glob.glob(f"{rows}/*.arrow")):
    with pa.OSFile(path) as file:
        found[os.path.basename(path)] = pa.ipc.open_stream(file).read_all()["id"].to_pylist()
print(f"datasets {datasets.__version__}: mapped {mapped['id'][:]}, loaded again {again['id'][:]}")
print(f"the folder's Arrow files hold {found}")
names = [name.split("-")[0] for name in found]
raise SystemExit(names != ["cache", "data"] or len(again) != 3)
PY
