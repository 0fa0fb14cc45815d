"""The machinery behind AsyncLM. Private: nothing here is imported from outside the core."""
