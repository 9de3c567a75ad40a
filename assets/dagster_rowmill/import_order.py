"""Puts the project's folder behind the libraries while Dagster loads the definitions; they import this module first.

Dagster puts the folder it works in before everything else, so a user's file with the name of a library, such as
`datasets` or `yaml`, would be imported in its place. `rowmill ui` starts Python in its safe mode; in it nothing but
Dagster has put that folder there.
"""

import os
import sys

if sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(os.getcwd()):
    sys.path.append(sys.path.pop(0))
