"""What runs behind AsyncLM. Private: nothing here is imported from outside the core."""
