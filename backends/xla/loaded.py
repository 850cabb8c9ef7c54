from plait.backends.xla.buckets import Buckets
class LoadedPrograms:
    chips=1
    buckets=Buckets()
    programs={}
    @staticmethod
    def open(folder, options): return LoadedPrograms()
    def pages(self, p): return dict(p)
    def weight_formats(self, mesh): return None
