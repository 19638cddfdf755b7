package sshdial

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"
)

// keepalive notices when the host no longer answers.
type keepalive struct {
	client   *ssh.Client
	heard    *atomic.Uint64 // bytes
	interval time.Duration
	count    int

	probes sync.WaitGroup
}

// watch sends a request at every interval. It returns a *KeepaliveError when
// count of them went unanswered for an interval each and nothing else was heard
// from the host, and nil when done is closed or the connection is lost.
//
// Any byte counts as a sign of life, as in OpenSSH: in a bulk transfer the answer
// may be far back in the queue.
func (k *keepalive) watch(done <-chan struct{}) error {
	ticker := time.NewTicker(k.interval)
	defer ticker.Stop()

	answers := make(chan error, 1)
	heard := k.heard.Load()
	waiting := false // for an answer
	unanswered := 0
	for {
		select {
		case <-done:
			return nil
		case err := <-answers:
			if err != nil {
				return nil
			}
			waiting = false
			continue
		case <-ticker.C:
		}
		if now := k.heard.Load(); now != heard {
			heard, unanswered = now, 0
		}
		if unanswered == k.count {
			return &KeepaliveError{Silence: time.Duration(k.count) * k.interval}
		}
		unanswered++
		if !waiting {
			waiting = true
			k.probes.Go(func() { answers <- k.probe() })
		}
	}
}

// probe sends one request and waits for the answer, which is a refusal: no
// server knows the request, and each must answer. It blocks when the host is
// frozen, in writing too, until the connection is closed.
func (k *keepalive) probe() error {
	_, _, err := k.client.SendRequest("keepalive@openssh.com", true, nil)
	return err
}
