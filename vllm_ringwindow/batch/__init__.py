# SPDX-License-Identifier: Apache-2.0
"""Offline jobs of any size: rows of a file through vLLM engines, by Ray Data.

``rows``: the input cut into chunks, a row's request, its result. ``results``: the
output folder, exact whatever was killed. ``job``: Ray Data's LLM processor between.
``cluster``: Ray's nodes, and the logs of engines.
"""
