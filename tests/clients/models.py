"""Pydantic models that the suites' structured answers and tools have in common."""

from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int
    city: str


class GetWeather(BaseModel):
    """Get the weather of a city."""

    city: str
