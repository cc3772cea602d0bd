"""Write the generated source of every golden case anew: ``python tests/regenerate_golden.py``; then read the diff."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import folders


def main() -> None:
    """Write the files that changed, and remove those of cases that are gone."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPARSETC_CACHE_DIR"] = folder
        sys.path += folders.PATHS
        files = sorted(Path(__file__).parent.glob("codegen/golden_*.py"))
        for module in (import_module(file.stem) for file in files if file.stem != "golden_checks"):
            module.FOLDER.mkdir(exist_ok=True)
            for name in module.CASES:
                text, file = module.source(name), module.path(name)
                if not file.exists() or file.read_text(encoding="utf-8") != text:
                    file.write_text(text, encoding="utf-8")
                    print(f"wrote {file}")
            for file in module.FOLDER.glob("*.py"):
                if file.stem not in module.CASES:
                    file.unlink()
                    print(f"removed {file}")


if __name__ == "__main__":
    main()
