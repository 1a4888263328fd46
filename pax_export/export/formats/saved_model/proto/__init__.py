"""Writes the messages of a SavedModel.

`tf.saved_model.save` finds the objects to save by tracing, and traces more
functions to save and restore it: some 6 ms for each variable.  An export knows
what it holds, so the messages of a SavedModel are filled in
directly, one file here for each of them:

    functions.py        a function for each signature and gradient
    objects.py          what `tf.saved_model.load` gives: variables and signatures;
                        and the same for sessions and servers, which know no objects
    ../checkpoint.py    the values of the variables

Functions of TensorFlow around a signature may hold anything; an export with
them is saved by TensorFlow (`../writer.py`).
"""
