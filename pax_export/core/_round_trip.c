/* `flatten` and `unflatten` of _tree.py in C: what every jitted call does to modules.

   A module keeps the pair that jax wants, (children, moduledef), in its slot
   `_pax_flat`.  To flatten it is to read that slot.  To unflatten is to make an
   object without its constructor, and to fill that slot past `__setattr__`.

   Whatever is not as simple as that, errors included, is left to the function of
   Python that does the same.  So both ways behave alike, and this one may stay
   away where nobody can compile it.  Nothing of a program is remembered between calls.

   Only the stable interface of Python is used: what is built once serves every
   later Python, and what a later one builds serves 3.11.  So no Py_RETURN_FALSE and its like:
   headers of Python 3.12 and later count no reference there, and 3.11 needs one. */

#include <Python.h>

/* What types of Python itself do; the same in every interpreter, found when this is loaded. */
static descrgetfunc get_member;
static descrsetfunc set_member;
static newfunc object_new;

/* slot.__get__(object), where slot is what Class.__dict__["name"] gives. */
static PyObject *
read_slot(PyObject *slot, PyObject *object)
{
    return get_member(slot, object, NULL);
}

/* slot.__set__(object, value) */
static int
fill_slot(PyObject *slot, PyObject *object, PyObject *value)
{
    return set_member(slot, object, value);
}

/* object.__new__(cls), and then its slot filled with the pair. */
static PyObject *
new_node(PyObject *cls, PyObject *slot, PyObject *children, PyObject *moduledef)
{
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

/* --- what containers hold: see _mutation_detection.py, which says the same in Python --- */

/* What a dict holds, key after value; one of a class of its own may have its own order. */
static PyObject *
content_of_dict(PyObject *dict)
{
    PyObject *pairs = PyMapping_Items(dict), *content = NULL;
    Py_ssize_t count = pairs == NULL ? 0 : PyList_Size(pairs);
    if (pairs != NULL)
        content = PyTuple_New(2 * count);
    for (Py_ssize_t n = 0; content != NULL && n < 2 * count; n++) {
        PyObject *part = PyTuple_GetItem(PyList_GetItem(pairs, n / 2), n % 2);
        if (part == NULL)
            Py_CLEAR(content);
        else
            PyTuple_SetItem(content, n, Py_NewRef(part));
    }
    Py_XDECREF(pairs);
    return content;
}

/* Adds a container with its content, and those inside of it, to a list, which it makes. */
static int
look(PyObject *dicts, PyObject *value, PyObject **found)
{
    PyObject *content;
    if (PyTuple_Check(value))
        content = Py_NewRef(value);
    else if (PyList_CheckExact(value))
        content = PyList_AsTuple(value);
    else if (PyDict_Check(value) && PySet_Contains(dicts, (PyObject *)Py_TYPE(value)) == 1)
        content = content_of_dict(value);
    else
        return 0;
    if (content == NULL)
        return -1;
    int status = 0;
    if (content != value) {
        if (*found == NULL)
            *found = PyList_New(0);
        if (*found == NULL || PyList_Append(*found, value) < 0 || PyList_Append(*found, content) < 0)
            status = -1;
    }
    if (status == 0)
        status = Py_EnterRecursiveCall(" in a container of a module");
    if (status == 0) {
        /* Keys of dicts are looked at, too: a tuple among them holds nothing that changes. */
        for (Py_ssize_t n = 0; status == 0 && n < PyTuple_Size(content); n++)
            status = look(dicts, PyTuple_GetItem(content, n), found);
        Py_LeaveRecursiveCall();
    }
    Py_DECREF(content);
    return status;
}

static PyObject *
seen_in(PyObject *dicts, PyObject *values)
{
    PyObject *found = NULL, *each, *each_of = PyObject_GetIter(values);
    int status = each_of == NULL ? -1 : 0;
    while (status == 0 && (each = PyIter_Next(each_of)) != NULL) {
        status = look(dicts, each, &found);
        Py_DECREF(each);
    }
    Py_XDECREF(each_of);
    PyObject *result = NULL;
    if (status == 0 && !PyErr_Occurred())
        result = found == NULL ? PyTuple_New(0) : PyList_AsTuple(found);
    Py_XDECREF(found);
    return result;
}

/* Whether a list or dict holds what it held: the same objects in the same places. */
static int
same_content(PyObject *container, PyObject *content)
{
    Py_ssize_t size = PyTuple_Size(content), at = 0;
    if (PyList_CheckExact(container)) {
        if (PyList_Size(container) != size)
            return 0;
        for (; at < size; at++)
            if (PyList_GetItem(container, at) != PyTuple_GetItem(content, at))
                return 0;
    }
    else if (PyDict_CheckExact(container)) {
        PyObject *key, *value;
        Py_ssize_t position = 0;
        if (2 * PyDict_Size(container) != size)
            return 0;
        for (; at < size && PyDict_Next(container, &position, &key, &value); at += 2)
            if (key != PyTuple_GetItem(content, at) || value != PyTuple_GetItem(content, at + 1))
                return 0;
    }
    else {
        PyObject *now = content_of_dict(container);
        int same = now != NULL && PyTuple_Size(now) == size;
        for (; same && at < size; at++)
            same = PyTuple_GetItem(now, at) == PyTuple_GetItem(content, at);
        Py_XDECREF(now);
        return same;
    }
    return 1;
}

/* Whether each container holds what it held when somebody first saw it; no errors come out.
   `seen` is a tuple of a container, its content, the next container and so on. */
static int
unchanged(PyObject *seen)
{
    Py_ssize_t count = PyTuple_Size(seen);
    for (Py_ssize_t n = 0; n + 1 < count; n += 2)
        if (!same_content(PyTuple_GetItem(seen, n), PyTuple_GetItem(seen, n + 1))) {
            PyErr_Clear();
            return 0;
        }
    return 1;
}

static PyObject *
is_unchanged(PyObject *module, PyObject *seen)
{
    if (!PyTuple_Check(seen))
        return PyErr_Format(PyExc_TypeError, "a tuple of containers and contents is needed");
    return PyBool_FromLong(unchanged(seen));
}

/* The two functions.  `held` is what they close over: the arguments of the
   function below that makes them. */

static PyObject *
flatten(PyObject *held, PyObject *node)
{
    PyObject *kept = read_slot(PyTuple_GetItem(held, 0), node);
    if (kept != NULL && PyTuple_CheckExact(kept))
        return kept;
    if (kept != NULL) {  /* a `Watched`: a pair, and what somebody may have got hold of */
        PyObject *pair = PyTuple_GetItem(kept, 0), *seen = PyTuple_GetItem(kept, 1);
        if (seen != NULL && unchanged(seen)) {
            Py_INCREF(pair);
            Py_DECREF(kept);
            return pair;
        }
        Py_DECREF(kept);
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

/* --- which values of a tree are modules: see _traversal.py, which says the same in Python --- */

/* What jax asks of each value, whether to stop there.  `held` is the class of modules, the list
   that they go to, and the set of the addresses of those met before, or None. */
static PyObject *
collect(PyObject *held, PyObject *value)
{
    PyTypeObject *node = (PyTypeObject *)PyTuple_GetItem(held, 0);
    PyObject *met = PyTuple_GetItem(held, 2), *address;
    int stop = 0;
    if (!PyType_IsSubtype(Py_TYPE(value), node))
        return PyBool_FromLong(0);
    if (PyList_Append(PyTuple_GetItem(held, 1), value) < 0)
        return NULL;
    if (met == Py_None)
        return PyBool_FromLong(0);
    address = PyLong_FromVoidPtr(value);
    stop = address == NULL ? -1 : PySet_Contains(met, address);
    if (stop == 0 && PySet_Add(met, address) < 0)
        stop = -1;
    Py_XDECREF(address);
    return stop < 0 ? NULL : PyBool_FromLong(stop);
}

static PyMethodDef collect_method = {"collect", collect, METH_O, NULL};

static PyObject *
make_collect(PyObject *module, PyObject *held)
{
    PyObject *node, *modules, *met;
    if (!PyArg_ParseTuple(held, "O!O!O", &PyType_Type, &node, &PyList_Type, &modules, &met))
        return NULL;
    if (met != Py_None && !PySet_Check(met))
        return PyErr_Format(PyExc_TypeError, "a set or None is needed");
    return PyCFunction_NewEx(&collect_method, held, NULL);
}

/* seen_in, closing over the set of the classes of dicts that are looked at. */
static PyMethodDef seen_in_method = {"seen_in", seen_in, METH_O, NULL};

static PyObject *
make_seen_in(PyObject *module, PyObject *dicts)
{
    if (!PyAnySet_Check(dicts))
        return PyErr_Format(PyExc_TypeError, "a set of classes is needed");
    return PyCFunction_NewEx(&seen_in_method, dicts, NULL);
}

static PyMethodDef methods[] = {
    {"is_unchanged", is_unchanged, METH_O, NULL},
    {"make_seen_in", make_seen_in, METH_O, NULL},
    {"make_collect", make_collect, METH_VARARGS, NULL},
    {"make_flatten", make_flatten, METH_VARARGS, NULL},
    {"make_unflatten", make_unflatten, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

static int
find_members(PyObject *module)
{
    get_member = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
    set_member = (descrsetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_set);
    object_new = (newfunc)PyType_GetSlot(&PyBaseObject_Type, Py_tp_new);
    return get_member != NULL && set_member != NULL && object_new != NULL ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)find_members},
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
