"""httpx's calls, with the machine's certificates read once: by themselves they read them for each call, in 50 ms."""

import functools

import httpx

_TLS = httpx.create_ssl_context()
get = functools.partial(httpx.get, verify=_TLS)
head = functools.partial(httpx.head, verify=_TLS)
post = functools.partial(httpx.post, verify=_TLS)
