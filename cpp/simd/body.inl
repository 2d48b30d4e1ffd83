// What the bodies share. Included inside an unnamed namespace after the lanes of one target.

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <class T>
const T* as_const(T* p) {
  return p;
}

template <class T>
inline Floats load_some(const T* p, std::size_t count) {
  T whole[kLanes] = {};
  __builtin_memcpy(whole, p, count * sizeof(T));
  return load(whole);
}
template <class T>
inline void store_some(T* p, const Floats& a, std::size_t count) {
  T whole[kLanes];
  store(whole, a);
  __builtin_memcpy(p, whole, count * sizeof(T));
}

// The line that is needed some way down the stream; past the end it is a hint without effect.
template <class T>
inline void ahead(const T* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + kAheadBytes);
}

// Calls f with the pointer under its element type.
template <class F>
inline void typed(const void* p, Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f32:
      return f(static_cast<const float*>(p));
    case Dtype::bf16:
      return f(static_cast<const Bf16*>(p));
    case Dtype::f16:
      return f(static_cast<const Half*>(p));
  }
}
template <class F>
inline void typed(void* p, Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f32:
      return f(static_cast<float*>(p));
    case Dtype::bf16:
      return f(static_cast<Bf16*>(p));
    case Dtype::f16:
      return f(static_cast<Half*>(p));
  }
}
