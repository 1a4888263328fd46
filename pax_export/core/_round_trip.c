/* `flatten` and `unflatten` of _tree.py in C: what every jitted call does to modules.

   A module keeps the pair that jax wants, (children, moduledef), in its slot
   `_pax_flat`.  To flatten it is to read that slot.  To unflatten is to make an
   object without its constructor, and to fill that slot past `__setattr__`.

   Whatever is not as simple as that, errors included, is left to the function of
   Python that does the same.  So both ways behave alike, and this one may stay
   away where nobody can compile it.  Nothing here is remembered between calls.

   Only the stable interface of Python is used: what is built once serves every
   later Python. */

#include <Python.h>

/* slot.__get__(object), where slot is what Class.__dict__["name"] gives. */
static PyObject *
read_slot(PyObject *slot, PyObject *object)
{
    descrgetfunc get = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
    return get(slot, object, NULL);
}

/* slot.__set__(object, value) */
static int
fill_slot(PyObject *slot, PyObject *object, PyObject *value)
{
    descrsetfunc set = (descrsetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_set);
    return set(slot, object, value);
}

/* object.__new__(cls), and then its slot filled with the pair. */
static PyObject *
new_node(PyObject *cls, PyObject *slot, PyObject *children, PyObject *moduledef)
{
    newfunc object_new = (newfunc)PyType_GetSlot(&PyBaseObject_Type, Py_tp_new);
    PyObject *no_arguments = PyTuple_New(0);
    PyObject *pair = PyTuple_Pack(2, children, moduledef);
    PyObject *node = NULL;
    if (no_arguments != NULL && pair != NULL)
        node = object_new((PyTypeObject *)cls, no_arguments, NULL);
    if (node != NULL && fill_slot(slot, node, pair) < 0)
        Py_CLEAR(node);
    Py_XDECREF(pair);
    Py_XDECREF(no_arguments);
    return node;
}

/* Whether each container holds what it held when somebody first saw it: see _watch.py.
   `seen` is a tuple of a container, its content, the next container and so on. */
static int
unchanged(PyObject *seen)
{
    Py_ssize_t count = PyTuple_Size(seen);
    for (Py_ssize_t n = 0; n + 1 < count; n += 2) {
        PyObject *container = PyTuple_GetItem(seen, n), *content = PyTuple_GetItem(seen, n + 1);
        Py_ssize_t size = PyTuple_Size(content), at = 0;
        if (PyList_Check(container)) {
            if (PyList_Size(container) != size)
                return 0;
            for (; at < size; at++)
                if (PyList_GetItem(container, at) != PyTuple_GetItem(content, at))
                    return 0;
        }
        else {
            PyObject *key, *value;
            Py_ssize_t position = 0;
            if (!PyDict_Check(container) || 2 * PyDict_Size(container) != size)
                return 0;
            for (; at < size && PyDict_Next(container, &position, &key, &value); at += 2)
                if (key != PyTuple_GetItem(content, at) || value != PyTuple_GetItem(content, at + 1))
                    return 0;
        }
    }
    return 1;
}

/* The two functions.  `held` is what they close over: the arguments of the
   function below that makes them. */

static PyObject *
flatten(PyObject *held, PyObject *node)
{
    PyObject *pair = read_slot(PyTuple_GetItem(held, 0), node);
    if (pair != NULL && PyTuple_CheckExact(pair))
        return pair;
    if (pair != NULL) {  /* a pair with containers that somebody may have got hold of */
        PyObject *seen = PyObject_GetAttrString(pair, "seen");
        int same = seen != NULL && PyTuple_Check(seen) && unchanged(seen);
        Py_XDECREF(seen);
        if (same)
            return pair;
        Py_DECREF(pair);
    }
    PyErr_Clear();
    return PyObject_CallFunctionObjArgs(PyTuple_GetItem(held, 1), node, NULL);
}

static PyObject *
unflatten(PyObject *held, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "unflatten takes 2 arguments, got %zd", count);
    PyObject *moduledef = arguments[0], *children = arguments[1], *node = NULL;
    PyObject *lazy = read_slot(PyTuple_GetItem(held, 1), moduledef);
    PyObject *cls = lazy == Py_True ? read_slot(PyTuple_GetItem(held, 2), moduledef) : NULL;
    if (cls != NULL && PyType_Check(cls))
        node = new_node(cls, PyTuple_GetItem(held, 0), children, moduledef);
    Py_XDECREF(cls);
    Py_XDECREF(lazy);
    if (node != NULL)
        return node;
    PyErr_Clear();
    return PyObject_CallFunctionObjArgs(PyTuple_GetItem(held, 3), moduledef, children, NULL);
}

/* METH_O and METH_FASTCALL: jax calls these without making a tuple of arguments. */
static PyMethodDef flatten_method = {"flatten", flatten, METH_O, NULL};
static PyMethodDef unflatten_method = {
    "unflatten", (PyCFunction)(void (*)(void))unflatten, METH_FASTCALL, NULL};

static PyObject *
make_flatten(PyObject *module, PyObject *held)
{
    PyObject *flat, *otherwise;
    if (!PyArg_ParseTuple(held, "O!O", &PyMemberDescr_Type, &flat, &otherwise))
        return NULL;
    return PyCFunction_NewEx(&flatten_method, held, NULL);
}

static PyObject *
make_unflatten(PyObject *module, PyObject *held)
{
    PyTypeObject *slot = &PyMemberDescr_Type;
    PyObject *flat, *lazy, *cls, *otherwise;
    if (!PyArg_ParseTuple(held, "O!O!O!O", slot, &flat, slot, &lazy, slot, &cls, &otherwise))
        return NULL;
    return PyCFunction_NewEx(&unflatten_method, held, NULL);
}

static PyMethodDef methods[] = {
    {"make_flatten", make_flatten, METH_VARARGS, NULL},
    {"make_unflatten", make_unflatten, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_round_trip", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC
PyInit__round_trip(void)
{
    return PyModuleDef_Init(&definition);
}
