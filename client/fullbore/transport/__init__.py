"""Bytes between here and the endpoint: connections and the event-stream grammar.

Nothing here knows of prompts, retries, limits or prices.
"""
