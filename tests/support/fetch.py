"""httpx's calls, with the machine's certificates read once: by themselves they read them for each call, in 50 ms.

They wait for a minute rather than five seconds: a slow machine is no failure.
"""

import functools

import httpx

_TLS = httpx.create_ssl_context()
get = functools.partial(httpx.get, verify=_TLS, timeout=60)
head = functools.partial(httpx.head, verify=_TLS, timeout=60)
post = functools.partial(httpx.post, verify=_TLS, timeout=60)
