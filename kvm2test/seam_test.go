package kvm2test_test

import (
	"testing"

	"github.com/kvm2/kvm2/fake"
	"github.com/kvm2/kvm2/kvm2test"
)

func TestSeam_FakeConforms(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(func() { _ = host.Close() })
	kvm2test.TestSeam(t, host, kvm2test.Caps{Prefix: "conformance", Pool: "default", Network: "default", Fake: true})
}
