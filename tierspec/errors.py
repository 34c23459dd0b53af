"""Errors that are the user's to mend: each message is one line that names the setting, field or file."""


class SettingError(ValueError):
    """Bad input. Commands print the message and exit with 2; the HTTP endpoint answers 400."""


class RunFailed(RuntimeError):
    """A run that ended through nobody's mistake, such as a lost process; the message says how it goes on. Commands
    print it and exit with 1."""


class ArtifactError(SettingError):
    """A file or directory that is missing, corrupt, half-written or of the wrong kind."""
