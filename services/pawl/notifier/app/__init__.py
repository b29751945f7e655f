"""The use cases of the notifier, over its ports."""
