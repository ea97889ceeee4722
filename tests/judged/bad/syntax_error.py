"""Python cannot read it. The judge should refuse, with file and line."""



def wrap(module)
    return module
