# SPDX-License-Identifier: Apache-2.0
"""Worker side: metadata -> impl, around an inner attention backend."""
