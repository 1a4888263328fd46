"""Rewrites third-party SavedModels so that older TensorFlow versions run them."""
