// Package kvm2test holds conformance suites to be run from tests.
//
// TestSeam checks that a kvm2.Dialer and the sessions that it opens keep the promises of kvm2.Conn. Run it on a Conn of
// your own, or on the fake and on a real host to see that both agree:
//
//	func TestMyDialer(t *testing.T) {
//		kvm2test.TestSeam(t, dialer, kvm2test.Caps{
//			Prefix: "conformance", Pool: "default", Network: "default", DomainType: "qemu",
//		})
//	}
//
// TestProvider checks the four-method contract of a machine provider: Create, Get, Delete and List. Run it on a
// kvm2.Provider, or on the wrapper that you put around one.
//
// Both are shown at work, on a wrapper and on a dialer, in docs/testing-with-the-fake.md
// (https://github.com/kvm2/kvm2/blob/main/docs/testing-with-the-fake.md).
//
// Each case says which rule it checks. What a case makes bears the prefix that the target was given, and is removed at
// its end, also when it fails; so is what an earlier run that was killed has left. A suite touches nothing else.
package kvm2test
