"""wrap raises on all ranks. The judge should say its error, and where."""



def wrap(module):
    raise ValueError("this module is too small")
