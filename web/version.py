"""The version of watchkeeper, as a literal so that asking for it imports nothing."""

from typing import Final

VERSION: Final = "0.1.0"
