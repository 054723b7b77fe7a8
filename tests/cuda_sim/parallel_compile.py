"""Parallel compilation of an extension's sources, which setuptools compiles one after the other.

build.py appends this file to PyCUDA's aksetup_helper.py.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

from setuptools.command.build_ext import build_ext


def _compile(compiler, sources, output_dir=None, macros=None, include_dirs=None, debug=0, **options):
    """Compile like `CCompiler.compile`, with one thread per source that waits for the compiler."""
    before, after = options.get("extra_preargs"), options.get("extra_postargs")
    depends = options.get("depends")
    macros, objects, after, flags, build = compiler._setup_compile(
        output_dir, macros, include_dirs, sources, depends, after
    )
    arguments = compiler._get_cc_args(flags, debug, before)

    def compile_one(item):
        target, (source, extension) = item
        compiler._compile(target, source, extension, arguments, after, flags)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, build.items()))
    return objects


def _build_extensions(self, build=build_ext.build_extensions):
    self.compiler.compile = functools.partial(_compile, self.compiler)
    build(self)


build_ext.build_extensions = _build_extensions
