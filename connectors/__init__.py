"""Plugs into engines, one package each, installed as `kvoffload.connectors`.

Relative imports among themselves, absolute ones for the core. An engine is imported only inside its own connector,
and what differs between its versions stands in that connector's compat.py.
"""
