"""The command `python -m optax_accum.verify module:make_step`. Imported, it is the function `optax_accum.verify`."""

import sys

from optax_accum._command.verify import main
from optax_accum._verify.verify import verify

if __name__ == "__main__":
    sys.exit(main())

sys.modules[__name__] = verify  # type: ignore[assignment]  # for an import of a submodule sets it in the package
