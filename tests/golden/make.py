"""Makes tests/golden/hickle<N>.hkl with the hickle package of each major version, in its own folder.

    pip install --target old six dill
    pip download --no-deps --no-binary :all: hickle==2.0.5        and unpack it
    python tests/golden/make.py old hickle-2.0.5 tests/golden/hickle2.hkl

Made with 1.4.0 (after 2to3), 2.0.5, 2.1.0, 3.4.9, 4.0.4 and 5.0.3, on Python 3.11 with h5py 3.16. The old
ones are Python 2's in places, hence the names given to builtins and NumPy below.
"""

import builtins
import io
import sys

import numpy as np

OLD_NAMES = {"file": io.IOBase, "unicode": str, "long": int, "basestring": str, "xrange": range}
OLD_NUMPY = {"float": float, "int": int, "bool": bool, "object": object, "str": str, "complex": complex}

if __name__ == "__main__":
    *folders, path = sys.argv[1:]
    sys.path[:0] = folders
    for name, value in (OLD_NAMES | {"NoneType": type(None), "ndarray": None}).items():
        setattr(builtins, name, value)
    for name, value in (OLD_NUMPY | {"unicode_": str, "string_": bytes, "float_": float}).items():
        if name not in vars(np):
            setattr(np, name, value)
    import hickle

    hickle.dump(np.arange(360).astype(np.uint8).reshape(3, 4, 5, 6), path, mode="w")
