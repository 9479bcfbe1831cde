/* Compare what dicts hold with what they held, by identity.

A training step looks at some thousand objects of a model once, when few of them are in the
processor's cache. Here each dict is read where it is, and what it refers to is not touched.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Whether PyDict_Next gives the order in which the dict is iterated over: an OrderedDict has one of
its own. */
static int in_order(PyObject *dict)
{
    return PyDict_Check(dict) && Py_TYPE(dict)->tp_iter == PyDict_Type.tp_iter;
}

/* Have the processor fetch some of the dicts after the n-th: their heads first, their keys later. */
static void fetch(PyObject *dicts, Py_ssize_t n)
{
    Py_ssize_t count = PyList_GET_SIZE(dicts);
    if (n + 16 < count)
        __builtin_prefetch(PyList_GET_ITEM(dicts, n + 16));
    if (n + 8 < count && PyDict_Check(PyList_GET_ITEM(dicts, n + 8))) {
        char *keys = (char *)((PyDictObject *)PyList_GET_ITEM(dicts, n + 8))->ma_keys;
        __builtin_prefetch(keys);
        __builtin_prefetch(keys + 64);
    }
}

static PyObject *same_held(PyObject *module, PyObject *args)
{
    PyObject *dicts, *held, *key, *value;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &dicts, &PyList_Type, &held))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(held), at = 0;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(dicts); n++) {
        PyObject *dict = PyList_GET_ITEM(dicts, n);
        fetch(dicts, n);
        if (!in_order(dict) || at == count || PyList_GET_ITEM(held, at++) != dict)
            Py_RETURN_FALSE;
        Py_ssize_t place = 0;
        while (PyDict_Next(dict, &place, &key, &value)) {
            if (at + 2 > count || PyList_GET_ITEM(held, at) != key
                || PyList_GET_ITEM(held, at + 1) != value)
                Py_RETURN_FALSE;
            at += 2;
        }
    }
    return PyBool_FromLong(at == count);
}

static PyObject *same_items(PyObject *module, PyObject *args)
{
    PyObject *dicts, *keys, *values;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &dicts, &PyTuple_Type, &keys,
                          &PyList_Type, &values))
        return NULL;
    Py_ssize_t width = PyTuple_GET_SIZE(keys);
    if (PyList_GET_SIZE(values) != width * PyList_GET_SIZE(dicts))
        Py_RETURN_FALSE;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(dicts); n++) {
        PyObject *dict = PyList_GET_ITEM(dicts, n);
        fetch(dicts, n);
        if (!PyDict_Check(dict))
            Py_RETURN_FALSE;
        for (Py_ssize_t k = 0; k < width; k++) {
            PyObject *value = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(keys, k));
            if (value == NULL && PyErr_Occurred())
                return NULL;
            if (value != PyList_GET_ITEM(values, n * width + k)) /* NULL is none of them */
                Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"same_held", same_held, METH_VARARGS,
     "same_held(dicts, held): whether each dict holds the keys and values that follow it in held, "
     "one after the other, and no others; False too where it is not iterated over in order."},
    {"same_items", same_items, METH_VARARGS,
     "same_items(dicts, keys, values): whether each dict has these values at these keys; values: "
     "of the first dict all, then of the next."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_same", "Compare what dicts hold with what they held.", 0, methods,
};

PyMODINIT_FUNC PyInit__same(void)
{
    return PyModule_Create(&definition);
}
