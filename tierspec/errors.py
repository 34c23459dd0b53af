"""Errors that are the user's to mend: each message is one line that names the setting, field or file."""


class SettingError(ValueError):
    """Bad input. Commands print the message and exit with 2; the HTTP endpoint answers 400."""


class ArtifactError(SettingError):
    """A file or directory that is missing, corrupt, half-written or of the wrong kind."""
