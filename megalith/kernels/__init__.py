"""One operation per file: a plain reference, which is the definition, and faster versions tested
against it."""
