"""Plugs into engines, one package per engine."""
