# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: what a ring costs (``spec``) and who owns it (``manager``)."""
