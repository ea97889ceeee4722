"""wrap takes no argument. The judge should refuse."""



def wrap():
    return None
