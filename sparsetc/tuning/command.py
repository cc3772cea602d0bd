"""``sparsetc tune``: look at the record of what was timed, carry it to another machine, forget it, fit rates to it.

In: arguments. Out: text, and files of lines.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparsetc.device.profile import path_of
from sparsetc.errors import FormatError
from sparsetc.explain import aligned, device_name
from sparsetc.tuning.lines import Line, append, lines, rewrite


def add_to(commands: Any) -> None:
    """Add the command, with its own commands, to a parser's."""
    tune = commands.add_parser("tune", help="the record of plans that were timed (tune=)")
    own = tune.add_subparsers(required=True, dest="action", metavar="action")
    listed = own.add_parser("list", help="print what was timed, the fastest of each problem first")
    listed.add_argument("--equation", default="", help="of those whose equation has this text")
    export = own.add_parser("export", help="write all lines of this cache folder to a file")
    export.add_argument("file", type=Path)
    merge = own.add_parser("merge", help="add the lines of a file that are not there yet")
    merge.add_argument("file", type=Path)
    forget = own.add_parser("forget", help="remove lines; all of them, unless an equation is given")
    forget.add_argument("--equation", default="", help="those whose equation has this text")
