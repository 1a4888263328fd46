"""Writes the messages of a SavedModel.

`tf.saved_model.save` finds the objects to save by tracing, and traces more functions to save and
restore them: some 6 ms per variable. An export knows its contents, so it writes the messages of a
SavedModel directly:

    messages.py     the fields of all messages; tensors, nodes and functions
    functions.py    a function per signature and gradient
    objects.py      the objects for `tf.saved_model.load`, variables and signatures; and the same
                    for sessions and servers, which have no objects

`../writer.py` writes them, and the values of the variables. TensorFlow functions around a signature
may have any resources, so TensorFlow saves an export with them (`../processing.py`).
"""
