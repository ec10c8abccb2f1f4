"""Everything that can stop a stage, as one small tree.

    PipelineError                 one clear line and exit code 1; the traceback goes to logs/
    ├── UserError (ValueError)    what the person at the keyboard can fix
    │   ├── ParamsError           params.yaml: unknown key, wrong type, value out of range
    │   ├── VerifierError         the verifier is not what params.yaml or verifier.json says
    │   └── DataError             an input file that no stage can make sense of
    ├── ServerError               vLLM did not start, or answers nonsense
    │   └── ServerStopped         it ran and then died, hung or failed every request
    └── BadRun                    the rows themselves show that going on is a waste
        ├── Refused               the server refuses one question after the other
        └── GateFailed            too few answers hold reasoning

A bad *row* raises nothing: it is counted under its reason (see `pipeline.records`).
Our own invariants are plain `assert`s.
"""


class PipelineError(Exception):
    """Stops a stage with one line that says what was wrong, where, and what to do."""


class UserError(PipelineError, ValueError):
    """The person who runs the pipeline can fix this."""


class ParamsError(UserError):
    """params.yaml does not describe a pipeline."""


class VerifierError(UserError):
    """The verifier's files or its server differ from what the run was promised."""


class DataError(UserError):
    """An input file is missing, empty or of no known shape."""


class ServerError(PipelineError):
    """The vLLM server did not come up, went away, or does not speak its protocol."""


class ServerStopped(ServerError):
    """A server that answered before no longer does; `what` says which and how."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; what was answered is stored, the next run goes on")
        self.what = what


class BadRun(PipelineError):
    """Enough rows failed to know that the remaining ones would fail too."""


class Refused(BadRun):
    """The server refuses questions in a row that it should take."""


class GateFailed(BadRun):
    """Too few answers hold reasoning."""
