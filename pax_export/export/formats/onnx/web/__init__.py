"""Folders with a model for browsers: onnxruntime-web, a JavaScript module and a page."""
