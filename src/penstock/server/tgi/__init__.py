"""TGI's dialect: `/generate`, `/generate_stream`, and what its clients ask before."""
