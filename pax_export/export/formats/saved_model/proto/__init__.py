"""Writes the messages of a SavedModel.

`tf.saved_model.save` finds the objects to save by tracing, and traces more functions to save and
restore them: some 6 ms per variable. An export knows its contents, so it writes the messages of a
SavedModel directly, one file here for each of them:

    functions.py        a function per signature and gradient
    objects.py          the objects for `tf.saved_model.load`, variables and signatures; and the
                        same for sessions and servers, which have no objects
    ../checkpoint.py    the values of the variables

TensorFlow functions around a signature may have any resources, so TensorFlow saves an export with
them (`../writer.py`).
"""
