"""The command `python -m optax_accum.verify module:make_step`. Imported, it is the function `optax_accum.verify`."""

import sys

from optax_accum._tools.verify import verify
from optax_accum._tools.verify_command import main

if __name__ == "__main__":
    sys.exit(main())

sys.modules[__name__] = verify  # type: ignore[assignment]  # for an import of a submodule sets it in the package
