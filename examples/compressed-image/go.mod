module github.com/kvm2/kvm2/examples/compressed-image

go 1.26.0

require (
	github.com/klauspost/compress v1.20.4
	github.com/kvm2/kvm2 v0.0.0
	github.com/ulikunitz/xz v0.5.17
)

require (
	github.com/digitalocean/go-libvirt v0.0.0-20261013170128-efbbdf578ac8 // indirect
	golang.org/x/crypto v0.59.0 // indirect
	golang.org/x/sys v0.50.0 // indirect
	libvirt.org/go/libvirtxml v1.12008.0 // indirect
)

replace github.com/kvm2/kvm2 => ../..
