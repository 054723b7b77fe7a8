"""Fuzzing guided by the coverage of lines: python -m campaigns.guided manifests --seconds 300

It has the readers and promises of campaigns.fuzz, but atheris chooses the next file by the coverage of the
previous ones. The first broken promise ends it. Install atheris first: it is not a dependency.
"""

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Run the campaign. Exit status 0: no promise was broken; otherwise the input's file is printed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.guided", description=__doc__.split("\n")[0])
    parser.add_argument("kind", help="kind of files, as in campaigns.fuzz")
    parser.add_argument("--seconds", type=int, default=300, help="(300)")
    words = parser.parse_args()
    try:
        import atheris
    except ImportError:
        parser.error(f"needs atheris: {sys.executable} -m pip install atheris")
    with atheris.instrument_imports(include=["lockstep", "preprocessing"]):
        from campaigns import fuzz
        from campaigns.mangling import mangle
    if words.kind not in fuzz.READERS:
        parser.error(f"there is no kind {words.kind!r}; there are: {', '.join(fuzz.READERS)}")
    reader, watch = fuzz.READERS[words.kind], fuzz.Watch()
    names, place = reader.bad_ones, Path(tempfile.mkdtemp(prefix="guided-"))
    folder, good = place / "folder", place / "good"
    fuzz.lay(folder, dict(reader.files))
    fuzz.lay(good, {str(n): bytes([n]) + reader.files[name] for n, name in enumerate(names)})

    def read(data: bytes) -> None:
        """Read an input, whose first byte selects the file that it replaces."""
        bad = names[data[0] % len(names)] if data else names[0]
        fuzz.lay(folder, {bad: data[1:]})
        words = fuzz.judge(reader, folder, watch, bad)
        fuzz.lay(folder, {bad: reader.files[bad]})
        if fuzz.Result(words).is_finding:
            raise RuntimeError(f"{bad}: {words}")

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        dice = random.Random(seed)
        if not data or dice.random() < 0.5:
            return atheris.Mutate(data, max_size)  # type: ignore[no-any-return]
        return (data[:1] + mangle(dice, names[data[0] % len(names)], data[1:]))[:max_size]

    os.chdir(place)
    limits = f"-max_total_time={words.seconds}", "-timeout=10", "-rss_limit_mb=4096"
    atheris.Setup([sys.argv[0], str(good), *limits], read, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
