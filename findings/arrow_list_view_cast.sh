#!/usr/bin/env bash
# pyarrow 26.0.1: casting a list view to a list loses the last row, without an error.
#
# [[1, 2], [3, 4]] as list_view<int64> is sound (validate(full=True) agrees) and shows its four numbers. cast(list<int64>)
# gives [[1, 2], []]: the offsets of the result lack their last end, which only validate(full=True) tells. flatten() and
# list_value_length() of the same view are right, so a list can be made of these two. A list view is what some engines write.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet pyarrow==26.0.1
"$folder/env/bin/python" - <<'PY'
import pyarrow as pa
import pyarrow.compute as pc

rows = [[1, 2], [3, 4]]
view = pa.array(rows, pa.list_view(pa.int64()))
view.validate(full=True)
cast = view.cast(pa.list_(pa.int64()))
try:
    cast.validate(full=True)
    told = "is valid"
except pa.ArrowInvalid as error:
    told = f"is not valid: {error}"
print(f"pyarrow {pa.__version__}: {len(view.flatten())} numbers, lengths {pc.list_value_length(view).to_pylist()}")
print(f"the cast has {len(cast)} rows and {told}")
raise SystemExit(told == "is valid")
PY
