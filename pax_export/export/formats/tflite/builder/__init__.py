"""TFLite graphs: operators are appended one by one; the bytes of a file come out."""
