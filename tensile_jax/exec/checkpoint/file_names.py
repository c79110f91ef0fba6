"""The names of what a checkpoint's folder has (`format.py`), for those who copy checkpoints without reading them."""

MARK = "tensile.json"
STATE = "state"
MANIFEST = "manifest.json"
