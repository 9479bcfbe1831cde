/* Copy memory past the cache.

A large copy whose target will not be read soon costs a third less memory traffic when its stores do
not first fetch the lines that they overwrite. The C library does so only for copies far larger
than a tensor. The interpreter lock is not held while copying.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

static void copy_streaming(char *to, const char *from, size_t count)
{
    size_t head = (16 - ((size_t)to & 15)) & 15;
    if (head > count)
        head = count;
    memcpy(to, from, head);
    to += head, from += head, count -= head;
    for (; count >= 64; to += 64, from += 64, count -= 64) {
        const __m128i *source = (const __m128i *)from;
        __m128i *target = (__m128i *)to;
        __m128i a = _mm_loadu_si128(source);
        __m128i b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2);
        __m128i d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
    memcpy(to, from, count);
}
#else
static void copy_streaming(char *to, const char *from, size_t count)
{
    memcpy(to, from, count);
}
#endif

static PyObject *copy(PyObject *module, PyObject *args)
{
    Py_ssize_t to, from, count;
    if (!PyArg_ParseTuple(args, "nnn", &to, &from, &count))
        return NULL;
    if (count < 0) {
        PyErr_SetString(PyExc_ValueError, "a negative number of bytes");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    copy_streaming((char *)to, (const char *)from, (size_t)count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(to, from, nbytes): copy between two addresses."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_stream", "Copy memory past the cache.", 0, methods,
};

PyMODINIT_FUNC PyInit__stream(void)
{
    return PyModule_Create(&definition);
}
