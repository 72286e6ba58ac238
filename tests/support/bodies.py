"""Request bodies compared with the parameters that a dialect's own documentation lists."""

from penstock.server.body import Body


def known_fields(body: type[Body]) -> set[str]:
    """Names of all fields that are supported, refused or known to have no effect."""
    return {*body.model_fields, *body.UNSUPPORTED, *body.WITHOUT_EFFECT}
