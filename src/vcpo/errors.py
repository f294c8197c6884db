"""The one exception type for mistakes that the user can fix."""


class UserError(Exception):
    """What was wrong, where, what is allowed and what to do, in one sentence.

    The command line prints the sentence without a traceback and exits with code 2. Anything else that is
    raised is a defect of the program or of the user's own code and keeps its traceback.
    """
