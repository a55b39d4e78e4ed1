# SPDX-License-Identifier: Apache-2.0
"""Models, prompts and measurements that compare ring with stock vLLM."""
