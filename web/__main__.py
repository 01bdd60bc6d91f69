"""``python -m web`` is ``watchkeeper``."""

from web.cli import main

main()
